"""The model families, one file each: names and keys of their Hugging Face folders, and presets.

Layer 0: imports only `spec` and needs no torch. A file of a family defines `FAMILY` and, if there are released sizes,
`PRESETS`. `format` defines these classes, `registry` collects all families, and `folder` reads and writes folders with
them.
"""
