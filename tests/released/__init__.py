"""Models, tokenizers and templates that others have released, as the truth; `make test-models` installs them."""
