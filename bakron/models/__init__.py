"""Models as a sequence of decoder blocks: which architectures (`layout`), how to read them (`load`), and how to run them block by block (`walk`)."""
