"""Keys of config.json that several families share, by subject: readers of HFConfig, and writers of a ModelSpec."""
