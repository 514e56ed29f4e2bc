"""What both packages use: errors, files, text for people, settings. Imports neither of them, nor torch."""
