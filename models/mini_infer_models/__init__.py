"""Model families and weight loaders, one folder each."""
