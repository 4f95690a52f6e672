"""Train large language models from one plan: model + cluster + job in, one explicit Plan out."""

__version__ = "0.1.0"
