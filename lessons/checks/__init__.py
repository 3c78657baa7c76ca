"""The implementation of xtrain.lesson: checks of a reader's kernels, figures, records, the exercises of each lesson."""
