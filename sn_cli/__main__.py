"""`python -m sn_cli` is `sn`, where no script was installed: in a clone."""

from .main import script

if __name__ == "__main__":
    script()
