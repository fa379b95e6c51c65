"""bakron inside other tools: one file a tool, imported by nothing else, so that none of those tools is needed elsewhere."""
