"""The IO side: moves bytes between the arena and chunk files, verifies, and reports."""
