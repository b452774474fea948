"""What a page is made of: charts, cards and tables as plain data, words for numbers, colours.

Nothing here knows a run. A unit, a name or a colour is added here.
"""
