"""What is asked of a plan or an estimate, and the answer, whoever asks: the command line, the page, or Python.

A question is an `argparse.Namespace` with one attribute for each flag that was given, by the flag's name. What was not
given is not there, so that a file, the machine or a default can say it.
"""
