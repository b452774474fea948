"""Everything that a person looks at: figures, pages, comparisons."""
