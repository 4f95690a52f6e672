"""Models in checkpoints and in Hugging Face folders: import, export, adapters and quantised weights."""
