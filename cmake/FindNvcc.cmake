# Finds nvcc where people have it: CUDACXX, PATH, CUDA_HOME, the usual prefix, and the nvcc that PyPI carries.

# The nvidia-cuda-nvcc wheel puts a toolkit in site-packages/nvidia/cu<major>.
function(nf4linear_pypi_toolkits out)
  set(${out} "" PARENT_SCOPE)
  set(python "${Python_EXECUTABLE}") # the build backend says which Python installs
  if(NOT python)
    find_program(python NAMES python3 python NO_CACHE)
  endif()
  if(NOT python)
    return()
  endif()
  # -I: pip's isolated build environment hides the packages of the one that is installed into.
  execute_process(COMMAND "${python}" -I -c "import sysconfig; print(sysconfig.get_path('purelib'))"
                  OUTPUT_VARIABLE site OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
  file(GLOB toolkits "${site}/nvidia/cu[0-9]*")
  set(${out} "${toolkits}" PARENT_SCOPE)
endfunction()

function(nf4linear_find_nvcc out)
  if(CMAKE_CUDA_COMPILER)
    set(${out} "${CMAKE_CUDA_COMPILER}" PARENT_SCOPE)
    return()
  endif()
  if(DEFINED ENV{CUDACXX})
    set(${out} "$ENV{CUDACXX}" PARENT_SCOPE)
    return()
  endif()
  nf4linear_pypi_toolkits(toolkits)
  list(TRANSFORM toolkits APPEND "/bin")
  find_program(nvcc nvcc NO_CACHE HINTS ENV PATH PATHS "$ENV{CUDA_HOME}/bin" "$ENV{CUDA_PATH}/bin" /usr/local/cuda/bin
                                        ${toolkits})
  if(NOT nvcc)
    set(nvcc "")
  endif()
  set(${out} "${nvcc}" PARENT_SCOPE)
endfunction()

# PyPI's toolkit keeps its libraries in lib/, where nvcc does not look by itself.
function(nf4linear_pypi_link_flags nvcc out)
  get_filename_component(bin "${nvcc}" DIRECTORY)
  get_filename_component(root "${bin}" DIRECTORY)
  if(EXISTS "${root}/lib/libcudart_static.a" AND NOT EXISTS "${root}/lib64")
    set(${out} "${CMAKE_CUDA_FLAGS} -L${root}/lib" PARENT_SCOPE)
  endif()
endfunction()
