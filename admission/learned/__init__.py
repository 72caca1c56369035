"""The default policy: it learns when chunks are used again, and keeps what pays most for its place.

    request -> history  ages of every chunk it names, by class: when they were used again, when not
            -> hazard   from those, per class and age: the chance of use, and the Gittins index
            -> places   each tier's leaves, and which of them pays least
            -> policy   what may cross a boundary, what it is worth, who makes room

The numeric parts are compiled and work on arrays, so that a live store and the replay of a trace
run the same code; `policy` and `order` are what a store sees of them.
"""
