# Target nf4linear_cuda, when nvcc and at least one architecture are known; otherwise one line that says why not.
include(FindNvcc)
include(CudaArchitectures)

nf4linear_find_nvcc(nvcc)
if(NOT nvcc)
  message(NOTICE "nf4linear: no nvcc found; installing without the CUDA library (GPUs use the slower torch path). "
                 "Put nvcc on PATH, set CUDACXX, or pip install nvidia-cuda-nvcc and its companions (CONTRIBUTING.md).")
  return()
endif()

nf4linear_cuda_architectures(architectures)
if(NOT architectures)
  return()
endif()
set(CMAKE_CUDA_COMPILER "${nvcc}")
# An architecture with a letter (90a) runs on that GPU only; of a plain one the PTX is kept too, for GPUs to come.
list(TRANSFORM architectures APPEND "-real" REGEX "[a-z]$" OUTPUT_VARIABLE CMAKE_CUDA_ARCHITECTURES)
nf4linear_pypi_link_flags("${nvcc}" CMAKE_CUDA_FLAGS)
enable_language(CUDA)

file(GLOB instantiations CONFIGURE_DEPENDS "${CMAKE_CURRENT_SOURCE_DIR}/csrc/inst_*.cu")
add_library(nf4linear_cuda SHARED csrc/entry.cu csrc/arrivals.cu ${instantiations})
list(JOIN architectures "," joined)
set_source_files_properties(csrc/entry.cu PROPERTIES COMPILE_DEFINITIONS "NF4L_ARCHITECTURES=\"${joined}\"")
target_include_directories(nf4linear_cuda PRIVATE csrc)
target_compile_options(nf4linear_cuda PRIVATE -lineinfo -Xcompiler=-Wall,-Wextra)
if(NF4LINEAR_WERROR)
  target_compile_options(nf4linear_cuda PRIVATE --Werror=all-warnings -Xcompiler=-Werror)
endif()
set_target_properties(nf4linear_cuda PROPERTIES CUDA_RUNTIME_LIBRARY Static)
# Only the nf4l_ names leave the library, not those of the static CUDA and C++ runtimes inside it: it can be built on one
# machine and copied to another.
if(CMAKE_SYSTEM_NAME STREQUAL "Linux" AND CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
  target_link_options(nf4linear_cuda PRIVATE -static-libstdc++ -static-libgcc)
endif()
if(CMAKE_SYSTEM_NAME STREQUAL "Linux")
  target_link_options(nf4linear_cuda PRIVATE -Wl,--exclude-libs,ALL -Wl,--no-undefined)
endif()
install(TARGETS nf4linear_cuda LIBRARY DESTINATION "${NF4LINEAR_LIBRARY_DIR}"
                               RUNTIME DESTINATION "${NF4LINEAR_LIBRARY_DIR}")
message(STATUS "nf4linear: CUDA library for ${joined}, ${nvcc}")
