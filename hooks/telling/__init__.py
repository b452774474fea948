"""What leaves the training process: rows, scalars, and what the file and the log are told.

It hands things to the feed (`dynscope.writing`) and knows nothing of models or tensors' meaning.
A new kind of message, or another way out for the numbers, belongs here.
"""
