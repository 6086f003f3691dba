"""What torch has but does not export, as far as the compiler needs it: no other file of ``passes`` names any of it.

``private_names`` lists every name with what breaks without it; a test holds the list against the installed torch and
against the code.
"""
