"""The commands, one module each. They parse arguments, call the other packages, and print."""
