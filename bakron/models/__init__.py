"""Models as a sequence of decoder blocks: which architectures (`layout`), how to read them (`load`), how to run them block by block (`walk`), and how their blocks keep
linears (`linears`, `experts`)."""
