"""From a model and its optimizers to the rows of a file: what the rooms below are joined into.

`survey` is a model as it is built now, `steps` follows a step from forward to row, `columns` keeps
the file's columns. The recorder (`dynscope.hooks.recorder`) drives these three.
"""
