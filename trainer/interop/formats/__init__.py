"""The formats of `export`: a module each, with its parts as `FORMAT` (see `trainer.interop.source`)."""
