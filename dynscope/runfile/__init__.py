"""The run file as it lies on the disk: its datasets, how HDF5 is opened, and who may write it.

Reading and writing are rooms above this one. A column of the file is added in `schema`; the format
is described in docs/file-format.md.
"""
