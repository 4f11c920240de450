"""Files of other programs: a folder for each, with its keys and how its files are read, written, checked, changed."""
