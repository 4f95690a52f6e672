"""Model families: names and keys of their Hugging Face folders, and their presets, one file each.

Layer 0: imports `spec` only and needs no torch. A file of this folder defines `FAMILY` and, if it has any, `PRESETS`.
`format` says what these are, `registry` finds them, and `folder` reads and writes folders with them.
"""
