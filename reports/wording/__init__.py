"""What a page says in sentences: facts of a run, its summary, the contrast of several.

Every sentence is made of numbers of all recorded rows, not of those drawn.
"""
