"""Whether a checkpoint's folder holds what its manifest says: evidence from the files, and a verdict."""
