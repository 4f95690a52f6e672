"""Requests at random against a server: `make test-fuzz`, and a slice of it in `make test`."""
