"""Code that both packages use: errors, files, text for people, settings, pages. It imports neither package, nor torch."""
