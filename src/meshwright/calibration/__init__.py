"""Runs as tables of published figures print them: read into what the cost model takes, and priced. The main commands do not import it."""
