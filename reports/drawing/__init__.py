"""From summaries to Plotly figures as plain data, of one run and of several.

A kind of chart is added here.
"""
