"""Models as sequences of blocks: architectures (`layout`), reading them (`load`), running them block by block (`walk`), what is a linear (`linears`, `experts`)."""
