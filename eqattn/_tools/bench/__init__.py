"""`python -m eqattn bench`: time, memory and accuracy, side by side with other libraries.

`cases` says what is measured and which figures are the aim, `peers` how each library is called,
`measure`, `decode` and `accuracy` how it is measured (`timing`: in turn), in a `child` process;
`cli` starts the children and `report` shows what they found. Nothing here is imported by
`import eqattn`.
"""
