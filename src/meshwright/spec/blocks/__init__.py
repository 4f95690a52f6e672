"""What a block computes: descriptions of its parts, and tables of operations from which all other facts about it
follow.
"""
