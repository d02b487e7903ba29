cdef class SharedObject:
    cdef readonly str path
    cdef void *handle  # owned by the process for its whole life
    cdef void *find(self, str name) except? NULL
    cdef void *resolve(self, str name) except NULL
