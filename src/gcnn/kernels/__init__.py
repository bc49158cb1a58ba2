"""Operations behind `gcnn.functional` and `gcnn.nn` that are worth their own code, one file each."""
