"""`python tests/measure bench` measures time, memory and accuracy, side by side with other libraries.

`cases` says what is measured and which figures are the aim, and `peers` how each library is called.
`measure`, `decode`, `ring` and `accuracy` say how it is measured, and `timing` times calls in turn.
All of it runs in a `child` process. `cli` starts the children, `report` shows what they found, and
`record` writes it into the documentation.
"""
