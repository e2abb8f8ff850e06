"""Small changes of the code that decides, and whether the tests of it notice: `penstock bench trust --part mutants`."""
