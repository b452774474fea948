"""Writing a run, so that training never waits and whatever happens what is there can be read.

`feed` is the training process's end, `link` the way to the writer process, `writer` what it runs.
"""
