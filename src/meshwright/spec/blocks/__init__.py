"""What a layer computes: descriptions of its parts, and tables of operations from which all other facts follow."""
