"""Reading a run: labelled arrays (`run.Run`), one long table, and exports for other tools.

Nothing here changes a file, and nothing needs torch.
"""
