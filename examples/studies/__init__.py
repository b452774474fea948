"""Studies that check the literature's claims at a size that a CPU can train: `make reproduce`."""
