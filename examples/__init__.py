"""Small language models of the literature, one file per rule, and the runs that show their claims."""
