"""Starting a run: what machine this is, which folder and plan the run gets, and the processes of its ranks. Torch-free."""
