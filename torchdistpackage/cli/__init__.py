"""The command `tdp`. main lists the commands; each is a file with a function of its name.

Files that begin with an underscore hold what commands share, or the tables that one of them prints:
_common has arguments, lists of problems and line breaks.
"""
