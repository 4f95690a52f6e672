"""Text that is read without preparation: listing and index of the files, loader processes, cache, and lanes."""
