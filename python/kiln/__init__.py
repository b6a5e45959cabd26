"""kiln: a compiler for unmodified PyTorch programs."""
