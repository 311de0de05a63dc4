"""When and what to checkpoint, one checkpoint's files, and the run directory they live in."""
