"""`python -m meshwright` is the `meshwright` command."""

from meshwright.cli.main import main

if __name__ == "__main__":
    main()
