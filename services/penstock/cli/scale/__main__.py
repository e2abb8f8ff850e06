"""`python -m penstock.cli.scale`."""

from penstock.cli.scale.service import app

if __name__ == "__main__":
    app()
