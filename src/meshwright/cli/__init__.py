"""The commands of the command line, one module each. They parse arguments, call the other packages, and print."""
