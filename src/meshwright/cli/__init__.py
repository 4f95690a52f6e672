"""The commands: one small module each. They parse, call, and print."""
