"""Charts with the words beside them: for each metric, and for trained weights.

A section of the page (`dynscope.reports.single`, `comparison`) is a list of these.
"""
