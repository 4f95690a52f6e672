"""Keys of config.json that several families share, by subject.

Each module reads them from an HFConfig and writes them from a ModelSpec.
"""
