"""`python -m eqattn bench`: time, memory and accuracy, side by side with other libraries.

`cases` says what is measured and which figures are the aim, `peers` how each library is called,
`measure` and `accuracy` how it is measured, in a `child` process; `cli` starts the children and
`report` shows what they found. Nothing here is imported by `import eqattn`.
"""
